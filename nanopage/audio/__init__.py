"""Speech to text: sound files, spectrograms, Whisper's rules of decoding, transcripts. The model is in families/."""
