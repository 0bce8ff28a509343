"""Options of the engine and a model's config.json, as data."""
