"""What users and files say, checked: options and fields of config.json, and those that only some models have."""
