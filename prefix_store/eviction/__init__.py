"""Which blocks a bounded tier keeps."""
