"""The content-addressed artifact store: one Protocol, a directory and S3 (docs/store.md)."""
