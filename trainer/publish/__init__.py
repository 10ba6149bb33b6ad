"""Publishing: trained models as Hugging Face folders, with a model card."""
