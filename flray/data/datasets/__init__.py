"""One file a dataset or a family of them; the registry is `flray.data.DATASETS`."""
