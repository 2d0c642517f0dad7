"""Norms, rotary embedding, attention, gates and routers, rounded as the engine rounds them."""
