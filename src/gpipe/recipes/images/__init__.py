"""The recipe of image classification: AmoebaNet on the digits, or on any folder of class folders."""
