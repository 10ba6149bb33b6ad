"""The families of models: `model.kind` names a module here."""
