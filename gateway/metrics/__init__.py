"""The gateway's metrics, by family. Every metric is named here."""
