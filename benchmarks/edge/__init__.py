"""Devices that draft for a server: are their tokens right whatever the network does, and how many are served?"""
