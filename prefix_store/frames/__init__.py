"""What KV blocks look like outside an engine: layouts, and frames that say what they hold."""
