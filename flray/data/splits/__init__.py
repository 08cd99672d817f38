"""One file a split; the registry is `flray.data.SPLITS`."""
