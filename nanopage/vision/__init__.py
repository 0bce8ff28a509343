"""Images in prompts: reading them, cutting them up for a model, and the towers that make hidden states of them."""
