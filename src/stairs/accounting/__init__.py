"""FLOPs, stored bytes and moved bytes, counted apart; each prediction has a counter beside it."""
