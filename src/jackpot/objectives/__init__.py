"""The papers as pure functions of tensors: OBRS, corrections, advantages, losses and the joint loss, eq. 8 of Jackpot."""
