"""Authentication and authorization: keys, certificates, rights, the audit log."""
