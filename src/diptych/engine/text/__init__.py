"""Text in and out: tokenizer, chat template, streaming detokeniser, reasoning and tool-call parsers. No tensors."""
