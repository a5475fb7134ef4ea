"""A small server with a real Llama forward pass and a strict loading contract. It is not vLLM and never claims to be."""
