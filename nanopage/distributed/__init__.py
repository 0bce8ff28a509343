"""Workers in other processes and on other machines."""
