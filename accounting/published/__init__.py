"""Published architectures: the fields of a config.json that determine the decoder, by name."""
