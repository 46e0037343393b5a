"""The step loop: schedule, forward, sample, commit. Token ids only; text stays outside."""
