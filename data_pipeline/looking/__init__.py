"""Looking at datasets: their statistics and their examples."""
