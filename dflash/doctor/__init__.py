"""What a target and a draft must satisfy to be a pair."""
