"""S-FC and S-LOCAL, the shallow networks of beta-LASSO (Neyshabur 2020)."""
