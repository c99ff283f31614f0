"""Prepared data on disk: .beton files, manifest.json, hashes of chunks, tokenized text."""
