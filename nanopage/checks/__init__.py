"""Checks of what users and files say: options, and fields of config.json, also those that only some models have."""
