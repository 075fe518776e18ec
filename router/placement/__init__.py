"""Where a request is computed: the workers that may take it, their order, and the policies that choose. Pure."""
