"""The papers as pure functions: OBRS, corrections, advantages, losses, and the joint loss of eq. 8. Torch only."""
