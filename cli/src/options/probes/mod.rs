//! Options that define probes and say what happens at their hits. They become the actions and the budget of a
//! request here; [`definitions`](crate::definitions) reads the definitions.

pub(crate) mod budget;
pub(crate) mod debug_info;
pub(crate) mod hits;
pub(crate) mod plant;
pub(crate) mod script;
