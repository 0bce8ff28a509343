"""Logits processors: functions that change the logits of a request (`SamplingParams.logits_processors`)."""
