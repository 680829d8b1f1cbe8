"""Trains one Transformer to translate from many languages to English."""
