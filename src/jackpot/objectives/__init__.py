"""The papers as pure functions of tensors: OBRS, corrections, advantages, losses, and Jackpot's joint loss, eq. 8."""
