"""What KV in tiers, and KV fetched from other workers, save, and whether loading is chosen where it is quicker."""
