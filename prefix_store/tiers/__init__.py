"""Where the bytes of KV blocks are kept: host memory, and a folder on disk that the processes of a host share."""
