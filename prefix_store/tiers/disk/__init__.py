"""The disk tier: frames in a folder that all engine processes of a host share. Read disk_tier.py first.

Each process has threads that read (reader.py), write (writer.py), pin and remove (control.py) and maintain the folder
(maintenance.py). One process of all holds the evictor's lock and evicts (evictor.py).

folder/
├── identity        a line with the UUID of the folder
├── evictor.lock    locked by the one process that evicts for all
├── blocks/xx/      one file per frame, named by its keys
├── pins/           an empty file per pin, named by the last block of the pinned chain
├── writing/        frames being written, renamed into blocks when complete
└── journals/       one file per process: what it wrote and used, for the evictor

The files in blocks/ and pins/ are the only state that counts. The rest is for the evictor's bookkeeping and may be
lost. Uses codecs, eviction and frames.
"""
