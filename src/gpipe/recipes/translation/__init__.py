"""The recipe of multilingual translation: one Transformer from many languages to English."""
