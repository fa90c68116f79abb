"""Frames in a folder that all engine processes of a host share. `DiskTier` is the whole of it to others.

folder/
├── identity        who this folder is: a line with a UUID
├── keeper          locked by the one process that evicts, for all
├── blocks/xx/      one file per frame, named by its keys
├── pins/           an empty file, by the block's name, where a chain must stay up to there
├── writing/        frames that are not whole yet, to be renamed into blocks
└── journals/       what each process wrote and used, for the keeper

The files are the truth: a frame is there if its file is. Pins are their files, too. All else is for the keeper's
books, and may be lost.
"""
