"""Embeddings, rerank and score: prompts are read and nothing is written. Shapes of OpenAI, Jina, Cohere and vLLM."""
