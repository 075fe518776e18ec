"""HTTP beneath the APIs: sockets, limits of connections and bodies, exchanges, errors."""
