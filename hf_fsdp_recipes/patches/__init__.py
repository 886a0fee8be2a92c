"""Every place where upstream code is changed at run time, one file for each upstream package."""
