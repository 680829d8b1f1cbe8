"""How weights are learnt, beside what torch's optimizers do."""
