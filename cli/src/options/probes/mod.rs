//! Options that define probes and say what happens at their hits. The actions and the budget of a request are made
//! here; [`definitions`](crate::definitions) reads the definitions.

pub(crate) mod budget;
pub(crate) mod debug_info;
pub(crate) mod hits;
pub(crate) mod plant;
pub(crate) mod script;
