"""The endpoints of the other APIs: they read a body, open a call and send its answer."""
