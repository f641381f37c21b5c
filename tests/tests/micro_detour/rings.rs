use super::{argument, next};
