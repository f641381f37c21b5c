//! Tests with whole images: partitions, file systems made by `mke2fs`, and what is booted from them.

mod boot;
mod damage;
mod loaders;
pub(crate) mod made;
mod qcow2;
