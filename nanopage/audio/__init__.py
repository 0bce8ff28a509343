"""Speech to text: sound files, spectrograms, Whisper's rules of decoding, transcripts. The model is in families/."""

WHISPER = "WhisperForConditionalGeneration"  # its `architectures` in config.json
