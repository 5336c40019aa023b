"""Why a plan is as it is: reasons, sensitivities, alternatives, and ZeRO-Infinity's way beside it."""
