"""What does a tenant, or a sequence of a batch, see of its neighbours?"""
