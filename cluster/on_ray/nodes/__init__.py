"""Node providers for `ray up`."""
