"""Who calls, and what he may do: keys, certificates, rights, the audit log."""
