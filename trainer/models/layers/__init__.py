"""Parts of Transformers: attention, norms, embeddings, dropout and the layers made of them."""
