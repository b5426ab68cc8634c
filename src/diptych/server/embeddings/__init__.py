"""Embeddings, rerank, score and classify: prompts are read and nothing is written. Shapes of OpenAI, Jina, Cohere and vLLM."""
