"""What users and files say, checked: options against their annotations, options of vLLM, fields of config.json."""
