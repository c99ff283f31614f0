"""What prepared data look like on disk: .beton files, manifest.json, hashes of blocks, tokenized text."""
