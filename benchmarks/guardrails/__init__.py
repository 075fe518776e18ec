"""What guardrails cost a gateway."""
